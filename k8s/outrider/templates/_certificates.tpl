{{/* The certificates that cert-manager is asked for, as a JSON list: name, secret, hosts, usages, and the values that they are made of. */}}
{{- define "outrider.certificates" -}}
{{- $made := list -}}
{{- $server := list "digital signature" "server auth" -}}
{{- with .Values.certificates.public -}}
{{- if .enabled -}}
{{- $made = append $made (dict "name" "public" "secret" $.Values.tls.secretName "hosts" .dnsNames "usages" $server "of" .) -}}
{{- end -}}
{{- end -}}
{{- with .Values.certificates.components -}}
{{- if .enabled -}}
{{- range $role, $secret := $.Values.componentTls -}}
{{- if $secret -}}
{{- $made = append $made (dict "name" $role "secret" $secret "hosts" (list (printf "%s.outrider.internal" $role)) "usages" (append $server "client auth") "of" $.Values.certificates.components) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "public" "components" -}}
{{- with get $.Values.certificates $kind -}}
{{- if ge (trimSuffix "h" .renewBefore | int) (trimSuffix "h" .duration | int) -}}
{{- fail (printf "certificates.%s.renewBefore is %s: must be shorter than certificates.%s.duration, %s" $kind .renewBefore $kind .duration) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $made -}}
{{- end -}}
