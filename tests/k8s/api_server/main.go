// The part of Kubernetes' API server that serves CustomResourceDefinitions, without users, rights and admission:
//
//	api-server serve --etcd-servers URL --secure-port PORT --cert-dir FOLDER
//	api-server decode < manifests.json
//
// decode reads one JSON document after the other, strictly, as the types of Kubernetes' own kinds, which a whole API server does
// first with every request (fieldValidation=Strict); it prints a line for each that it refuses, with the document's number.
// What a whole API server does beyond (defaults, validation and admission of its own kinds) is not in this part.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/trace/noop"

	"k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/cmd/server/options"
	generated "k8s.io/apiextensions-apiserver/pkg/generated/openapi"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/kubernetes/scheme"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(words []string) error {
	switch {
	case len(words) > 0 && words[0] == "serve":
		return serve(words[1:])
	case len(words) == 1 && words[0] == "decode":
		return decode(os.Stdin)
	}
	return errors.New("usage: api-server serve FLAGS | api-server decode < manifests.json")
}

func serve(flags []string) error {
	given := options.NewCustomResourceDefinitionsServerOptions(os.Stdout, os.Stderr)
	part := given.RecommendedOptions
	part.Authentication, part.Authorization, part.Admission, part.CoreAPI = nil, nil, nil, nil
	part.Features.EnablePriorityAndFairness = false
	part.SecureServing.BindAddress = net.IPv4(127, 0, 0, 1)
	known := pflag.NewFlagSet("api-server", pflag.ContinueOnError)
	given.ServerRunOptions.AddUniversalFlags(known)
	part.Etcd.AddFlags(known)
	part.SecureServing.AddFlags(known)
	if err := known.Parse(flags); err != nil {
		return err
	}
	if err := errors.Join(given.ServerRunOptions.ComponentGlobalsRegistry.Set(), given.Complete()); err != nil {
		return err
	}
	if err := given.Validate(); err != nil {
		return err
	}
	made, err := configuration(given)
	if err != nil {
		return err
	}
	running, err := made.Complete().New(server.NewEmptyDelegate())
	if err != nil {
		return err
	}
	return running.GenericAPIServer.PrepareRun().RunWithContext(server.SetupSignalContext())
}

// configuration is what the options' own Config makes, without what asks another API server.
func configuration(given *options.CustomResourceDefinitionsServerOptions) (*apiserver.Config, error) {
	part := given.RecommendedOptions
	if err := part.SecureServing.MaybeDefaultWithSelfSignedCerts("localhost", nil, []net.IP{net.IPv4(127, 0, 0, 1)}); err != nil {
		return nil, err
	}
	generic := server.NewRecommendedConfig(apiserver.Codecs)
	if err := errors.Join(
		given.ServerRunOptions.ApplyTo(&generic.Config),
		part.ApplyTo(generic),
		given.APIEnablement.ApplyTo(&generic.Config, apiserver.DefaultAPIResourceConfigSource(), apiserver.Scheme),
	); err != nil {
		return nil, err
	}
	generic.OpenAPIV3Config = server.DefaultOpenAPIV3Config(
		generated.GetOpenAPIDefinitions, openapi.NewDefinitionNamer(apiserver.Scheme, scheme.Scheme),
	)
	return &apiserver.Config{
		GenericConfig: generic,
		ExtraConfig: apiserver.ExtraConfig{
			CRDRESTOptionsGetter: options.NewCRDRESTOptionsGetter(*part.Etcd, generic.ResourceTransformers, generic.StorageObjectCountTracker),
			AuthResolverWrapper:  webhook.NewDefaultAuthenticationInfoResolverWrapper(nil, nil, generic.LoopbackClientConfig, noop.NewTracerProvider()),
		},
	}, nil
}

func decode(from io.Reader) error {
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	documents := json.NewDecoder(from)
	for number := 0; ; number++ {
		var document json.RawMessage
		if err := documents.Decode(&document); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if _, _, err := strict.Decode(document, nil, nil); err != nil {
			fmt.Printf("%d: %v\n", number, err)
		}
	}
}
